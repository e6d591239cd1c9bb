"""Contents of files: one folder, one file per id. An upload becomes visible only when it is complete on disk.

```
FOLDER/batches.db            metadata, see `batch.store`
FOLDER/lock                  held by the server that uses the folder
FOLDER/contents/file-…       contents
FOLDER/uploads/…             unfinished uploads; deleted at the next start
```
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from headrace.files import private_file, private_folder, private_opener


class Contents:
    """The folder; it is created if it is missing, and locked.

    Raises:
        BlockingIOError: another server uses it.
        OSError: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self._contents = self.folder / "contents"
        self._uploads = self.folder / "uploads"
        for each in (self.folder, self._contents, self._uploads):
            private_folder(each)
        self._lock = open(self.folder / "lock", "w", opener=private_opener)  # noqa: SIM115 (closed by close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise BlockingIOError(f"another server uses {self.folder}") from error

    @property
    def database(self) -> Path:
        """The file of the metadata."""
        return self.folder / "batches.db"

    def path(self, id: str) -> Path:
        """The path of the contents of ``id``."""
        return self._contents / id

    def upload(self) -> Upload:
        """Begin to store a new file."""
        return Upload(self._uploads / secrets.token_hex(12))

    def remove(self, id: str) -> None:
        """Delete contents, if there are any."""
        self.path(id).unlink(missing_ok=True)

    def tidy(self, known: set[str]) -> None:
        """Delete unfinished uploads, and contents without metadata. Make the other contents private."""
        for left in (*self._uploads.iterdir(), *self._unknown(known)):
            left.unlink(missing_ok=True)
        for each in self._contents.iterdir():
            private_file(each)

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def _unknown(self, known: set[str]) -> Iterator[Path]:
        return (path for path in self._contents.iterdir() if path.name not in known)


class Upload:
    """A file that is being received, until `keep` or `drop`. Its calls block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0, opener=private_opener)  # noqa: SIM115 (closed by keep and drop)
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.nbytes += len(data)

    def sync(self) -> None:
        """Flush written data to the disk; this may take long."""
        os.fsync(self._file.fileno())

    def keep(self, path: Path) -> None:
        """Make the synced file the contents at ``path``."""
        self._file.close()
        self._path.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def drop(self) -> None:
        """Delete the received data; after `keep`, do nothing."""
        self._file.close()
        self._path.unlink(missing_ok=True)
