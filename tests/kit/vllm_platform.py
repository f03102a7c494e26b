"""A plug-in of vLLM that chooses its CPU, although the wheel was built for CUDA."""


def register() -> str:
    """Return the class of the platform."""
    return "vllm.platforms.cpu.CpuPlatform"
