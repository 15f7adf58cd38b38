"""Object stores whose uploads are made of parts: S3, Google Cloud Storage and Azure Blob Storage.

Parts are sent several at a time, each held in memory only while it is on its way. Every request has a time limit that
really ends it, and an error in plain words. A payload counts as written once the store's own account of it (size and
checksum) agrees with what was sent.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import io
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import google_crc32c

from lightning_ckpt_policy import retry
from lightning_ckpt_policy.backends import CHUNK_BYTES, Backend, redact_error, size_error
from lightning_ckpt_policy.checksum import Checksum
from lightning_ckpt_policy.errors import BucketNotFoundError
from lightning_ckpt_policy.rng import draw_apart

PART_BYTES = 16 << 20
CONNECTIONS = 8
REQUEST_SECONDS = 30.0
FLOOR_BYTES_PER_SECOND = 256 << 10
_LEAST_PART_BYTES = 5 << 20  # of S3
_IN_FLIGHT_BYTES = PART_BYTES * CONNECTIONS
_LEAST_CONNECTIONS = 4
_MIB = 1 << 20
_NO_PERMISSION = (401, 403)
_BUSY = (429, 500, 502, 503, 504)
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "SSOTokenLoadError",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
    "CredentialUnavailableError",
)
_NO_CONNECTION = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ClientConnectorError",
    "ServiceRequestError",
    "SSLError",
)
_STALE = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
)
_CLIENTS = ("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "s3fs", "urllib3")
_T = TypeVar("_T")


def plan(size: int, part_bytes: int | None, connections: int | None, most_parts: int) -> tuple[int, int]:
    """Bytes of a part, and how many go at once, for a payload of ``size`` bytes.

    By default a part has 16 MiB and 8 go at once. A small payload is cut into as many parts as go at once; a very large
    one into larger parts, fewer of them at once, so that at most 128 MiB (or four parts) are on their way.

    >>> plan(1 << 30, None, None, 10_000)
    (16777216, 8)
    >>> plan(64 << 20, None, None, 10_000)
    (8388608, 8)
    >>> plan(1 << 40, None, None, 10_000)
    (110100480, 4)
    """
    at_once = connections or CONNECTIONS
    if part_bytes is None:
        part_bytes = min(PART_BYTES, max(_LEAST_PART_BYTES, _whole_mib(size / at_once)))
    part_bytes = max(part_bytes, _whole_mib(size / most_parts))
    if connections is None and part_bytes > PART_BYTES:
        at_once = max(_LEAST_CONNECTIONS, _IN_FLIGHT_BYTES // part_bytes)
    return part_bytes, at_once


def _whole_mib(size: float) -> int:
    return -int(-size // _MIB) * _MIB


class ObjectStoreBackend(Backend, ABC):
    """One folder of a store that takes a payload in parts."""

    slow_reads = True
    deletes_at_once = 16
    most_parts: ClassVar[int] = 10_000
    permissions: ClassVar[Mapping[str, str]] = {}
    bucket_word: ClassVar[str] = "bucket"

    def __init__(self, fs: Any, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(fs, root, storage_options)
        if not self.root.strip("/"):
            raise ValueError(f"dirpath={self.url('')!r} names no {self.bucket_word}: put it after '://'")
        self._limits = threading.local()
        draw_apart(_CLIENTS)
        self._renewing = threading.Lock()
        self._adapt(fs)
        self._proven: Any = None  # the last filesystem that an answer came through

    def _adapt(self, fs: Any) -> None:
        """Set what can't be set by the filesystem's options."""

    # Requests

    @contextlib.contextmanager
    def time_limit(self, seconds: float | None) -> Iterator[None]:
        """End every request of this thread once ``seconds`` have passed since now."""
        before = getattr(self._limits, "deadline", None)
        self._limits.deadline = before if seconds is None else time.monotonic() + seconds
        try:
            yield
        finally:
            self._limits.deadline = before

    def _seconds(self, size: int = 0) -> float:
        """How long a request that carries ``size`` bytes may take."""
        seconds = REQUEST_SECONDS + size / FLOOR_BYTES_PER_SECOND
        deadline: float | None = getattr(self._limits, "deadline", None)
        if deadline is None:
            return seconds
        left = deadline - time.monotonic()
        if left <= 0:
            raise _timeout("the time limit of this save has passed", self.root)
        return min(seconds, left)

    def _call(self, doing: str, method: str, path: str, *args: Any, size: int = 0, **options: Any) -> Any:
        return self._run(doing, path, self._method(method, path, *args, **options), size)

    def _method(self, name: str, *args: Any, **options: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
        """A call of the filesystem that there is when it's made."""
        return lambda: getattr(self.fs, f"_{name}")(*args, **options)

    def _run(self, doing: str, path: str, function: Callable[[], Coroutine[Any, Any, _T]], size: int = 0) -> _T:
        """Run a coroutine on the filesystem's loop, again after errors that may pass, within its time limit."""
        return self._start(doing, path, function, size).result()

    def _start(
        self, doing: str, path: str, function: Callable[[], Coroutine[Any, Any, _T]], size: int = 0
    ) -> concurrent.futures.Future[_T]:
        seconds = self._seconds(size)
        coroutine = self._within(seconds, doing, path, function)
        return asyncio.run_coroutine_threadsafe(coroutine, self.fs.loop)

    async def _within(
        self, seconds: float, doing: str, path: str, function: Callable[[], Coroutine[Any, Any, _T]]
    ) -> _T:
        last: list[BaseException] = []

        async def once() -> _T:
            try:
                return await self._with_fresh_credentials(function)
            except Exception as error:
                plain = self._plain(error, doing, path)
                last[:] = [plain]
                if plain is error:
                    raise
                raise plain from (error if redact_error(error, self._options) else None)

        try:
            return await asyncio.wait_for(retry.retrying_async(_may_pass)(once), seconds)
        except (asyncio.TimeoutError, TimeoutError) as error:
            if last and last[0] is error:
                raise
            why = f"; the last answer was {last[0]}" if last else ""
            raise _timeout(f"the store didn't {doing} it within {seconds:.0f} s{why}", path) from None

    async def _with_fresh_credentials(self, function: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Call a coroutine function; once more with another filesystem if its credentials are refused."""
        used = self.fs
        try:
            done = await function()
        except Exception as error:
            if not _is_stale(error) or not await _in_a_thread(self._renew, used):
                raise
            used = self.fs
            done = await function()
        self._proven = used
        return done

    def _renew(self, used: Any) -> bool:
        """Take a new filesystem, which reads the credentials again, if they were good before; whether there is one."""
        with self._renewing:
            if self.fs is used and self._proven is used:
                with contextlib.suppress(Exception):
                    fs = self.fresh()
                    self._adapt(fs)
                    self.fs = fs
            return self.fs is not used

    def _plain(self, error: Exception, doing: str, path: str) -> Exception:
        """The error as an ``OSError`` that says what to do; anything that isn't the store's is left alone."""
        if not redact_error(error, self._options):
            return OSError(errno.EIO, "the store failed; its error quotes storage_options and isn't shown", path)
        status = _status(error)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = text.splitlines()[0][:300]
        bucket = path.strip("/").split("/", 1)[0]
        if isinstance(error, (BucketNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)):
            return error
        if status == 412:
            return FileExistsError(errno.EEXIST, "there is such an object already", path)
        if status in _NO_PERMISSION or isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
            return PermissionError(
                errno.EACCES,
                f"not allowed to {doing} in the {self.bucket_word} {bucket!r}: it needs {self.permissions[doing]}, "
                f"and credentials that haven't expired ({text})",
                path,
            )
        if status == 404 or isinstance(error, FileNotFoundError):
            if "NoSuchUpload" in repr(error.__cause__):
                return OSError(errno.EIO, "its upload was ended by someone else, or had ended already", path)
            if doing == "write":  # a key need not exist to be written
                return BucketNotFoundError(
                    errno.ENOENT, f"there is no {self.bucket_word} {bucket!r}: make it, or correct the URL", path
                )
            if isinstance(error, FileNotFoundError):
                return error
            return FileNotFoundError(errno.ENOENT, "there is no such object", path)
        if any(kind.__name__ in _NO_CONNECTION for kind in type(error).__mro__):
            return ConnectionError(errno.EHOSTUNREACH, f"the store can't be reached ({text})", path)
        if status in _BUSY:
            return ConnectionError(errno.EBUSY, f"the store didn't {doing} it for now ({text})", path)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or path
            return error
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in _CLIENTS:
            return OSError(errno.EIO, f"the store didn't {doing} it ({text})", path)
        return error

    # Files

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        path = self.path(name)
        size = int(self._call("read", "info", path)["size"])
        connections = self.connections or CONNECTIONS
        chunk_bytes = min(chunk_bytes, max(_MIB, _whole_mib(size / connections)))
        reads: deque[concurrent.futures.Future[Any]] = deque()
        try:
            for start in range(0, size, chunk_bytes):
                end = min(start + chunk_bytes, size)
                reads.append(
                    self._start("read", path, self._method("cat_file", path, start=start, end=end), end - start)
                )
                if len(reads) >= connections:
                    yield bytes(reads.popleft().result())
            while reads:
                yield bytes(reads.popleft().result())
        finally:
            for read_ in reads:
                read_.cancel()

    def read_many(self, names: Iterable[str]) -> dict[str, bytes | Exception]:
        return {name: data for batch in _batches(tuple(names), 512) for name, data in self._read_batch(batch).items()}

    def _read_batch(self, names: Sequence[str]) -> dict[str, bytes | Exception]:
        started = [
            (name, self._start("read", self.path(name), self._method("cat_file", self.path(name)))) for name in names
        ]
        found: dict[str, bytes | Exception] = {}
        for name, future in started:
            try:
                found[name] = bytes(future.result())
            except Exception as error:
                found[name] = error
        return found

    def _compare_small(self, name: str, data: bytes) -> None:
        if self.read(name) != data:
            raise _damage(self.path(name), "other bytes arrived")

    def write_payload(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int,
        confirm: Callable[[], None] = lambda: None,
        tag: str = "",
    ) -> None:
        path = self.path(name)
        new = self.size(name) is None
        part_bytes, connections = plan(size, self.part_bytes, self.connections, self.most_parts)
        whole = Checksum()
        upload: Any = None
        finishing = False
        pending: set[concurrent.futures.Future[Any]] = set()
        try:
            upload = self._run("write", path, lambda: self._begin(path, tag or uuid.uuid4().hex[:8]))
            sent: list[concurrent.futures.Future[Any]] = []
            written = 0
            parts = _parts(chunks, part_bytes)
            while True:
                while len(pending) >= connections:  # before the next part takes memory
                    pending = _progress(pending)
                part = next(parts, None)
                if part is None:
                    break
                whole.update(part)
                written += len(part)
                future = self._start("write", path, _bind(self._send, upload, len(sent), part), len(part))
                sent.append(future)
                pending.add(future)
                del part  # only the request holds it now
            while pending:
                pending = _progress(pending)
            if written != size:
                raise size_error(path, written, size)
            confirm()
            finishing = True
            self._finish(upload, [future.result() for future in sent], path, size, whole.value, new)
            self._run("delete", path, lambda: self._clean_up(upload))
        except BaseException:
            for future in pending:
                future.cancel()
            if upload is not None:
                with contextlib.suppress(Exception):
                    self._run("write", path, lambda: self._abort(upload))
            if finishing and new:
                self._discard(name)
            raise

    def _finish(self, upload: Any, parts: list[Any], path: str, size: int, checksum: int, new: bool) -> None:
        failed: Exception | None = None
        try:
            self._run("write", path, lambda: self._complete(upload, parts), size)
        except Exception as error:
            failed = error  # but its answer may have been lost, so what lies there decides
        try:
            certain = self._run("read", path, lambda: self._compare(upload, parts, path, size, checksum))
        except Exception as error:
            raise failed or error from None
        if failed is not None and not (certain or new):
            raise failed

    # What each store does in its own way

    @abstractmethod
    async def _begin(self, path: str, tag: str) -> Any:
        """Begin an upload."""

    @abstractmethod
    async def _send(self, upload: Any, index: int, data: bytes) -> Any:
        """Send one part; what is returned goes to `_complete`."""

    @abstractmethod
    async def _complete(self, upload: Any, parts: list[Any]) -> None:
        """Make the object appear."""

    async def _abort(self, upload: Any) -> None:
        """Remove what an upload that failed has sent."""

    async def _clean_up(self, upload: Any) -> None:
        """Remove what was only needed to make the object."""

    @abstractmethod
    async def _compare(self, upload: Any, parts: list[Any], path: str, size: int, checksum: int) -> bool:
        """Whether the store's checksum says that the object is ours; False if it has none to compare.

        Raises:
            OSError: Its size or its checksum is another one.
        """


class S3Backend(ObjectStoreBackend):
    """S3, and what speaks its language."""

    permissions: ClassVar[Mapping[str, str]] = {
        "write": "s3:PutObject and s3:AbortMultipartUpload",
        "read": "s3:GetObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    }

    def _adapt(self, fs: Any) -> None:
        fs.max_concurrency = 1  # else s3fs asks for an object's size before it reads it

    async def _begin(self, path: str, tag: str) -> dict[str, Any]:
        bucket, key, _ = self.fs.split_path(path)
        upload = {"Bucket": bucket, "Key": key}
        await self.fs.set_session()
        # as botocore does by itself, unless the user told it that the store doesn't know checksums
        config = self.fs._s3.meta.config
        checked = getattr(config, "request_checksum_calculation", None) != "when_required"
        kind = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"} if checked else {}
        begun = await self.fs._call_s3("create_multipart_upload", **upload, **kind)
        return {"keys": {**upload, "UploadId": begun["UploadId"]}, "checked": checked}

    async def _send(self, upload: dict[str, Any], index: int, data: bytes) -> dict[str, Any]:
        ours = _base64_crc(google_crc32c.value(data))
        extra = {"ChecksumCRC32C": ours} if upload["checked"] else {}
        keys = upload["keys"]
        body = _Body(data)
        answer = await self.fs._call_s3("upload_part", **keys, PartNumber=index + 1, Body=body, **extra)
        theirs = answer.get("ChecksumCRC32C")
        if theirs is None and _is_md5(answer):
            loop = asyncio.get_running_loop()
            ours = await loop.run_in_executor(None, lambda: hashlib.md5(data, usedforsecurity=False).hexdigest())
            theirs = _etag(answer)
        if theirs not in (None, ours):
            raise _damage(keys["Key"], f"part {index + 1} has the checksum {theirs} instead of {ours}")
        part = {"PartNumber": index + 1, "ETag": answer["ETag"]}
        return {**part, "ChecksumCRC32C": ours} if answer.get("ChecksumCRC32C") else part

    async def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        if not parts:  # a multipart upload has at least one
            parts = [await self._send(upload, 0, b"")]
        await self.fs._call_s3("complete_multipart_upload", **upload["keys"], MultipartUpload={"Parts": parts})

    async def _abort(self, upload: dict[str, Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self.fs._call_s3("abort_multipart_upload", **upload["keys"])

    async def _compare(self, upload: dict[str, Any], parts: list[Any], path: str, size: int, checksum: int) -> bool:
        keys = {key: upload["keys"][key] for key in ("Bucket", "Key")}
        found = await self.fs._call_s3("head_object", **keys, ChecksumMode="ENABLED")
        _compare_sizes(path, found["ContentLength"], size)
        theirs = found.get("ChecksumCRC32C")
        if theirs is not None and "-" not in theirs:
            _compare_checksums(path, theirs, _base64_crc(checksum))
            return True
        if parts and all(_is_md5(part) for part in parts) and re.fullmatch(r"[0-9a-f]{32}-\d+", _etag(found)):
            joined = b"".join(bytes.fromhex(_etag(part)) for part in parts)
            ours = f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
            _compare_checksums(path, _etag(found), ours)
            return True
        return False

    async def _clean_up(self, upload: dict[str, Any]) -> None:
        # where the answer to the first request was lost there is another upload of this name
        with contextlib.suppress(Exception):  # it needs one more permission, and a lifecycle rule does it as well
            await self._abort_all(upload["keys"]["Bucket"], upload["keys"]["Key"])

    async def _abort_all(self, bucket: str, key: str) -> None:
        listed = await self.fs._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
        for one in listed.get("Uploads", []):
            if one["Key"] == key:
                await self._abort({"keys": {"Bucket": bucket, "Key": key, "UploadId": one["UploadId"]}})

    def drop_unfinished(self, name: str, tag: str) -> Sequence[str]:
        path = self.path(name)
        bucket, key, _ = self.fs.split_path(path)
        with contextlib.suppress(PermissionError):  # to list uploads
            self._run("list", path, lambda: self._abort_all(bucket, key))
        return []


class GcsBackend(ObjectStoreBackend):
    """Google Cloud Storage: parts are objects of their own, which the store then puts together."""

    most_parts: ClassVar[int] = 10_000
    most_composed: ClassVar[int] = 32
    permissions: ClassVar[Mapping[str, str]] = {
        "write": "storage.objects.create and storage.objects.delete",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    }

    def _adapt(self, fs: Any) -> None:
        # gcsfs tries again for half a minute by itself, also after an answer that is final
        inner = getattr(fs, "_target", fs)
        once = getattr(type(inner)._request, "__wrapped__", None)
        if once is not None:
            inner._request = functools.partial(once, inner)

    async def _begin(self, path: str, tag: str) -> dict[str, Any]:
        folder, _, name = path.rpartition("/")
        return {"path": path, "prefix": f"{folder}/{_part_prefix(name, tag)}", "made": []}

    async def _send(self, upload: dict[str, Any], index: int, data: bytes) -> str:
        part = f"{upload['prefix']}{index:06d}"
        upload["made"].append(part)
        await self._put(part, data)
        return part

    async def _put(self, path: str, data: bytes) -> None:
        # as gcsfs' own _pipe_file, which makes two more copies of the bytes, and keeps what the store answers to itself
        bucket, key, _ = self.fs.split_path(path)
        answer = await self.fs._call(
            "POST",
            f"{self.fs._location}/upload/storage/v1/b/{quote(bucket)}/o",
            uploadType="media",
            name=key,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
        )
        if "crc32c" in answer:
            _compare_checksums(path, answer["crc32c"], _base64_crc(google_crc32c.value(data)))

    async def _complete(self, upload: dict[str, Any], parts: list[str]) -> None:
        level = 0
        while len(parts) > self.most_composed:
            groups = [parts[i : i + self.most_composed] for i in range(0, len(parts), self.most_composed)]
            level += 1
            parts = [f"{upload['prefix']}{level}-{index:06d}" for index in range(len(groups))]
            upload["made"] += parts
            await asyncio.gather(*(self.fs._merge(to, group) for to, group in zip(parts, groups, strict=True)))
        if parts:
            await self.fs._merge(upload["path"], parts)
        else:
            await self._put(upload["path"], b"")

    async def _abort(self, upload: dict[str, Any]) -> None:
        await self._clean_up(upload)

    async def _clean_up(self, upload: dict[str, Any]) -> None:
        await self._remove_all(upload["made"])

    async def _remove_all(self, paths: list[str]) -> None:
        async def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self.fs._rm_file(path)

        for batch in _batches(paths, 32):
            await asyncio.gather(*(remove(path) for path in batch))

    async def _compare(self, upload: dict[str, Any], parts: list[str], path: str, size: int, checksum: int) -> bool:
        found = await self.fs._info(path)
        _compare_sizes(path, found["size"], size)
        if "crc32c" not in found:
            return False
        _compare_checksums(path, found["crc32c"], _base64_crc(checksum))
        return True

    def drop_unfinished(self, name: str, tag: str) -> Sequence[str]:
        prefix = _part_prefix(name, tag)
        parts = sorted(found for found in self.names() if found.startswith(prefix))
        self._run("delete", self.path(name), lambda: self._remove_all([self.path(part) for part in parts]))
        return parts


class AzureBackend(ObjectStoreBackend):
    """Azure Blob Storage: blocks that one request then makes a blob of."""

    most_parts: ClassVar[int] = 50_000
    bucket_word: ClassVar[str] = "container"
    permissions: ClassVar[Mapping[str, str]] = {
        "write": "the role Storage Blob Data Contributor (or write and create in its SAS)",
        "read": "the role Storage Blob Data Reader (or read in its SAS)",
        "list": "the role Storage Blob Data Reader (or list in its SAS)",
        "delete": "the role Storage Blob Data Contributor (or delete in its SAS)",
    }

    def _blob(self, path: str) -> Any:
        container, blob, _ = self.fs.split_path(path)
        return self.fs.service_client.get_blob_client(container=container, blob=blob)

    async def _begin(self, path: str, tag: str) -> dict[str, Any]:
        return {"path": path, "tag": tag}

    async def _send(self, upload: dict[str, Any], index: int, data: bytes) -> str:
        # of one length in every upload: Azure refuses a blob's blocks of different lengths, also across uploads
        block = f"{hashlib.sha256(upload['tag'].encode()).hexdigest()[:8]}-{index:06d}"
        async with self._blob(upload["path"]) as blob:
            await blob.stage_block(block, data, length=len(data), validate_content=True)
        return block

    async def _complete(self, upload: dict[str, Any], parts: list[str]) -> None:
        from azure.storage.blob import BlobBlock

        async with self._blob(upload["path"]) as blob:
            blocks = [BlobBlock(block_id=block) for block in parts]
            await blob.commit_block_list(blocks, metadata={"is_directory": "false"})

    async def _compare(self, upload: dict[str, Any], parts: list[str], path: str, size: int, checksum: int) -> bool:
        # Azure checked each block's MD5 on arrival, and a list of blocks names them
        async with self._blob(path) as blob:
            found = await blob.get_blob_properties()
            _compare_sizes(path, found.size, size)
            committed, _ = await blob.get_block_list("committed")
        _compare_checksums(path, [block.id for block in committed], parts)
        return True


OBJECT_STORES: dict[str, type[ObjectStoreBackend]] = {
    "s3": S3Backend,
    "s3a": S3Backend,
    "gs": GcsBackend,
    "gcs": GcsBackend,
    "az": AzureBackend,
    "abfs": AzureBackend,
    "abfss": AzureBackend,
}


class _Body(io.RawIOBase):
    """Bytes as a file. Of plain bytes, and of ``io.BytesIO``, the client makes a second copy to send them."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._data.nbytes}[whence]
        self._place = max(0, begin + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._place : self._place + len(buffer)]
        buffer[: piece.nbytes] = piece
        self._place += piece.nbytes
        return piece.nbytes


def _parts(chunks: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """The bytes of ``chunks`` in parts of ``part_bytes``; only the last may be shorter."""
    held: list[memoryview] = []
    bytes_held = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            piece = view[: part_bytes - bytes_held]
            view = view[piece.nbytes :]
            held.append(piece)
            bytes_held += piece.nbytes
            if bytes_held == part_bytes:
                yield b"".join(held)
                held.clear()
                bytes_held = 0
    if held:
        yield b"".join(held)


def _progress(pending: set[concurrent.futures.Future[Any]]) -> set[concurrent.futures.Future[Any]]:
    """Wait for one of ``pending`` to end; raises its error. Returns those that haven't ended."""
    ended, left = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
    for future in ended:
        future.result()
    return left


def _bind(function: Callable[..., _T], *args: Any, **options: Any) -> Callable[[], _T]:
    return lambda: function(*args, **options)


async def _in_a_thread(function: Callable[..., _T], *args: Any) -> _T:
    """So that it can wait for the loop that this runs on."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


def _batches(items: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _may_pass(error: BaseException) -> bool:
    return retry.is_transient(error) and not isinstance(error, FileNotFoundError)


def _is_stale(error: BaseException) -> bool:
    """Whether credentials were refused as such, rather than what was asked with them."""
    if _status(error) == 401 or type(error).__name__ in _NO_CREDENTIALS:
        return True
    response = getattr(error.__cause__, "response", None)  # botocore
    return isinstance(response, Mapping) and response.get("Error", {}).get("Code") in _STALE


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of any client stands for."""
    cause = error.__cause__
    for one in (error, cause):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for key in ("status_code", "code", "status"):
            value = getattr(one, key, None)
            if isinstance(value, (int, str)) and str(value).isdigit():
                return int(value)
    return 403 if isinstance(error, OSError) and str(error).startswith("Forbidden:") else None  # gcsfs


def _part_prefix(name: str, tag: str) -> str:
    return f".{name}.{tag}.part-"


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _is_md5(answer: Mapping[str, Any]) -> bool:
    """Whether an S3 ETag is an MD5: not where the store encrypts with a key of its user's."""
    encrypted = answer.get("SSECustomerAlgorithm") or answer.get("ServerSideEncryption") not in (None, "AES256")
    return not encrypted and re.fullmatch("[0-9a-f]{32}", _etag(answer)) is not None


def _base64_crc(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _compare_sizes(path: str, theirs: int, ours: int) -> None:
    if theirs != ours:
        raise size_error(path, theirs, ours)


def _compare_checksums(path: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise _damage(path, f"the store has the checksum {theirs} instead of {ours}")


def _timeout(what: str, path: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"{what}: {path!r}")  # asyncio drops the third argument


def _damage(path: str, what: str) -> OSError:
    return OSError(errno.EIO, f"it was damaged on its way: {what}", path)
