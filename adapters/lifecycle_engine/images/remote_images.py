"""Images that a request names instead of bringing them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import anyio
import anyio.to_thread

from lifecycle import Gate, Payload, Session
from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.http.https_get import HttpsGet, NotFetched
from lifecycle_engine.incoming import Incoming, Remote
from lifecycle_engine.processor import Chat

from .media import Measure, MediaLimits, check_total, measure, weigh


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImages:
    """Brings what requests name, into their chats.

    Attributes:
        get: Fetches one file.
        media: What an image may be.
        gate: Over the bytes of files, until hand-off. One of its own: who waits for it
            holds a body, and who has passed it waits for no body.
        threads: Bounds the threads that read headers of images.
    """

    get: HttpsGet
    media: MediaLimits
    gate: Gate
    threads: anyio.CapacityLimiter = field(repr=False)

    async def bring(
        self, session: Session, box: Payload[Chat], incoming: Incoming, held: ExitStack
    ) -> tuple[Incoming, Payload[Chat]]:
        """Fetch the images of a request, all at a time.

        Args:
            session: Of the request.
            box: Its chat, with a place for each image; empty afterwards.
            incoming: The request.
            held: Takes the lease over the bytes; close it at hand-off.

        Returns:
            The request with its images weighed, and the box of its chat.

        Raises:
            ApiError: 400, 413 or 504; no word of a URL is in it.
            Refused: As from `Gate.admit`; at the latest after the seconds that the
                files themselves may take.

        Cancellation:
            At any time; connections are closed.
        """
        limits, remote = self.get.limits, incoming.remote
        if len(remote) > limits.files:
            message = f"{len(remote)} images by URL; the limit is {limits.files}"
            raise ApiError(400, message, code="too_many_images", param=remote[0].param)
        # It holds a place in flight meanwhile, which is not for ever.
        size = limits.file_bytes * len(remote)
        lease = await self.gate.admit(bytes=size, max_wait=limits.seconds)
        held.enter_context(lease)
        files = await self._fetch(remote)
        lease.settle(bytes=sum(map(len, files)))
        measures = [*incoming.measures, *await self._measure(files, remote)]
        check_total(measures, self.media, param=incoming.fields.images)
        chat = box.take()
        for one, file in zip(remote, files, strict=True):
            content = chat.messages[one.message].content
            assert isinstance(content, list)
            content[one.part] = file
        brought = replace(
            incoming,
            weight=weigh(measures),
            measures=tuple(measures),
            remote=(),
        )
        weight = sum(each.encoded for each in measures)
        return brought, session.box(chat, nbytes=weight)

    async def _fetch(self, remote: Sequence[Remote]) -> list[bytes]:
        files = [b""] * len(remote)
        problems: list[ApiError] = []
        late = ApiError(504, "An image took too long to fetch", code="image_timeout")

        async def one(at: int, scope: anyio.CancelScope) -> None:
            try:
                files[at] = await self.get(remote[at].url)
            except NotFetched as error:
                problems.append(_problem(error, remote[at].param))
                scope.cancel()

        with anyio.move_on_after(self.get.limits.seconds) as clock:
            async with anyio.create_task_group() as tasks:
                for at in range(len(remote)):
                    tasks.start_soon(one, at, tasks.cancel_scope)
        if clock.cancelled_caught:
            problems.append(late)
        if problems:
            raise problems[0]
        return files

    async def _measure(
        self, files: Sequence[bytes], remote: Sequence[Remote]
    ) -> list[Measure]:
        def all_() -> list[Measure] | ApiError:
            try:
                return [
                    measure(file, self.media, param=one.param)
                    for file, one in zip(files, remote, strict=True)
                ]
            except ApiError as error:
                # A worker thread holds on to what it raised until it runs again.
                return error.with_traceback(None)

        found = await anyio.to_thread.run_sync(all_, limiter=self.threads)
        if isinstance(found, ApiError):
            raise found
        return found


def _problem(error: NotFetched, param: str) -> ApiError:
    code = "image_too_large" if error.status == 413 else "remote_image_refused"
    return ApiError(error.status, f"The image {error}", code=code, param=param)
