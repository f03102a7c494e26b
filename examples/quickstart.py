"""A decorated generator without a server: admission by bytes, and nothing leaks.

Run it: python examples/quickstart.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio

from lifecycle import Gate, Payload, Refused, SessionRegistry, managed

MIB = 2**20
gate = Gate(bytes=64 * MIB, max_waiting=4, max_wait=5.0)


async def main() -> None:
    """Run six clients against one small gate."""
    async with SessionRegistry() as sessions:

        @managed(
            gate=gate,
            cost=lambda name, picture: len(picture),
            scrub="picture",
            sessions=sessions,
            key=lambda name, picture: name,
        )
        async def describe(
            name: str, picture: Payload[bytes]
        ) -> AsyncGenerator[str, None]:
            """Stand in for a model: take the picture, then stream words."""
            await anyio.sleep(0.05)  # preprocessing, with the lease held
            size = len(picture.take())
            for word in (name, "sees", f"{size // MIB} MiB"):
                await anyio.sleep(0.01)  # the lease was released with the first word
                yield word

        async def stay(name: str, size: int) -> None:
            try:
                async with describe(name, bytes(size)) as words:
                    print(*[word async for word in words])
            except Refused as refused:
                print(f"{name} was refused: {refused.reason}")

        async def leave(name: str, size: int) -> None:
            with anyio.move_on_after(0.02):
                await stay(name, size)
            print(f"{name} disconnected")

        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(stay, f"client {number}", 40 * MIB)
            clients.start_soon(leave, "impatient client", 40 * MIB)
            clients.start_soon(stay, "greedy client", 65 * MIB)

        statistics = sessions.statistics()
        print({name: count for name, count in statistics.outcomes.items() if count})
        assert gate.statistics().bytes_in_use == 0
        assert statistics.live == statistics.closing == statistics.payloads == 0
        print("nothing is left")


if __name__ == "__main__":
    anyio.run(main)
