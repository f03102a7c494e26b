"""A pytest plugin for `suites.py`: wraps applications, and reports each outcome."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

OUTCOMES: dict[str, str] = {}
# Calls that went through a middleware, by the type of their scope.
CALLS: Counter[str] = Counter()
# Where frameworks are called as an application, and where their clients take one.
APPLICATIONS = (
    ("starlette.applications", "Starlette"),
    ("sse_starlette.sse", "EventSourceResponse"),
    ("quart", "Quart"),
    ("litestar", "Litestar"),
    ("django.core.handlers.asgi", "ASGIHandler"),
)
CLIENTS = (
    ("starlette.testclient", "_TestClientTransport"),
    ("httpx", "ASGITransport"),
    ("httpx2", "ASGITransport"),
)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst of a test's three phases."""
    before = OUTCOMES.get(report.nodeid, "passed")
    if report.failed:
        before = "failed" if report.when == "call" else "error"
    elif report.skipped and before == "passed":
        before = "xfailed" if hasattr(report, "wasxfail") else "skipped"
    OUTCOMES[report.nodeid] = before


def pytest_sessionfinish() -> None:
    """Write the report."""
    report = {"outcomes": OUTCOMES, "calls": CALLS}
    Path(os.environ["SUITE_REPORT"]).write_text(json.dumps(report))


def pytest_configure() -> None:
    """Set up Django, as its own test program does, and wrap applications."""
    if Path.cwd().parent.name.startswith("django"):
        set_up_django()
    if how := os.environ["SUITE_WRAP"]:
        wrap_all(how)


def set_up_django() -> None:
    """Django's own settings for its tests, with SQLite in memory."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "test_sqlite")
    from django.conf import settings

    settings.ALLOWED_HOSTS = ["testserver"]
    settings.ROOT_URLCONF = "urls"
    settings.INSTALLED_APPS = [
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sites",
        "django.contrib.sessions",
        "django.contrib.messages",
        "django.contrib.staticfiles",
        "async",
    ]
    settings.SITE_ID = 1
    settings.MIGRATION_MODULES = dict.fromkeys(("auth", "contenttypes", "sessions"))
    import django
    from django.test.utils import get_runner, setup_test_environment

    django.setup()
    setup_test_environment()
    runner = get_runner(settings)(verbosity=0, interactive=False)
    runner.setup_databases()


def wrap_all(how: str) -> None:
    """Have every application of a framework called through a middleware.

    Args:
        how: ``admission``, or the `read_ahead` of `LifecycleMiddleware`.
    """
    from lifecycle_asgi import Admission, LifecycleMiddleware

    wrapped: Any = functools.partial(Admission, environment={})
    if how != "admission":
        wrapped = functools.partial(LifecycleMiddleware, read_ahead=int(how))
    for module, name in APPLICATIONS:
        if (found := look_up(module, name)) is not None:
            found.__call__ = called_through(wrapped, found.__call__)
    for module, name in CLIENTS:
        if (found := look_up(module, name)) is not None:
            found.__init__ = made_with(wrapped, found.__init__)


def look_up(module: str, name: str) -> Any:
    """Return what a module has under that name, if it is installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def called_through(wrapped: Any, call: Any) -> Any:
    """Return a ``__call__`` that goes through the middleware."""

    async def through(self: Any, scope: Any, receive: Any, send: Any) -> None:
        app = functools.partial(call, self)
        if is_inside(scope):
            await app(scope, receive, send)
            return
        CALLS[scope["type"]] += 1
        await wrapped(app)(scope, receive, send)

    return through


def made_with(wrapped: Any, init: Any) -> Any:
    """Return an ``__init__`` whose application is wrapped."""

    @functools.wraps(init)
    def make(self: Any, app: Any, *args: Any, **options: Any) -> None:
        init(self, outermost(wrapped, app), *args, **options)

    return make


def outermost(wrapped: Any, app: Any) -> Any:
    """Return *app*, wrapped and with its calls counted."""
    through = wrapped(app)

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if is_inside(scope):
            await app(scope, receive, send)
            return
        CALLS[scope["type"]] += 1
        await through(scope, receive, send)

    return call


def is_inside(scope: Any) -> bool:
    """Whether this request is already inside a middleware of ours, further out.

    A server has one; applications that are mounted in another would get one each.
    """
    return scope["type"] == "http" and getattr(scope.get("lifecycle"), "live", False)
