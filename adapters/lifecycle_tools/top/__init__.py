"""``lifecycle top``: the live view of a server, in a terminal.

Modules::

    events    the events of a live view, read over HTTP
    rows      a snapshot as the cells of tables
    terminal  Top: the terminal application

It needs only the address of a server that has a `lifecycle_asgi.LiveView`.
"""

from __future__ import annotations

try:
    import httpx2 as _httpx
    import textual as _textual
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle top needs {error.name}; pip install "anyio-lifecycle[tools]"',
        name=error.name,
    ) from None

from lifecycle_tools.top.events import NoLiveView, Viewer
from lifecycle_tools.top.terminal import Top, run

__all__ = ("NoLiveView", "Top", "Viewer", "run")

for _name in __all__:
    globals()[_name].__module__ = __name__
del _name, _httpx, _textual
