"""Reads many files in two threads."""

from collections.abc import Sequence

class FileReads:
    """Reads files from their beginnings, in order, each into a header and a block.

    The thread that waits for a file reads too. If there is much to read, a second thread helps it. Files in the page
    cache are read as they are; from the first that is not, the kernel fetches the next few ahead. One thread may call
    this object.
    """

    def __init__(
        self, paths: Sequence[str], into: Sequence[tuple[memoryview, memoryview]], num_more: Sequence[int]
    ) -> None:
        """`num_more`: how many bytes may follow the block; they are not kept. Links are not followed.

        Raises `ValueError` unless the three have equal lengths.
        """

    def wait(self, index: int) -> int:
        """Return once a file was read, or could not be: the number of its bytes that were read, or a negative errno."""

    def close(self) -> None:
        """Begin to read no more files, and return when none is being read. The others have `-errno.ECANCELED`."""
