"""Says which extra brings what is missing, wherever it is missed first."""

from importlib.util import find_spec


def need(*names: str) -> None:
    """Look for packages of the extra, and import none.

    Not in `lifecycle_engine` itself: models and scheduling run where torch is, and
    nothing of a server.

    Raises:
        ModuleNotFoundError: One of them is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f'lifecycle_engine needs {name}; pip install "anyio-lifecycle[engine]"',
                name=name,
            )
