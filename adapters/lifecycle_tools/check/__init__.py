"""The conformance suite: what a server does when clients leave, attack or are many.

Modules::

    client      HTTP/1.1 on a socket, with control over each byte and each leave
    payloads    the bodies that are sent: small honest ones, and bombs
    process     CPU time and memory of a server on the same host
    report      findings, and tables of them
    target      what all checks share: the server, its baselines, how work is seen
    leaving     clients that leave, at each phase of a request
    bombs       requests that are small, and cost much
    overload    more requests than a server has room for, and slow ones
    suite       all checks, in their order
    command     the subcommands ``check`` and ``check-compare``
"""

from __future__ import annotations

try:
    import rich as _rich
    import typer as _typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle check needs {error.name}; pip install "anyio-lifecycle[tools]"',
        name=error.name,
    ) from None

from lifecycle_tools.check.report import Finding, Report

__all__ = ("Finding", "Report")

for _name in __all__:
    globals()[_name].__module__ = __name__
del _name, _rich, _typer
