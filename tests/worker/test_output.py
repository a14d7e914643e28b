"""What a device process prints: kept to its last line, and never more than two files of 8 MiB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbox_worker.device.output import LONGEST_BYTES, PIECE_BYTES, BoundedLog, Output
from tests.disks import small_disk

MIB = 2**20


@pytest.fixture
def log(tmp_path: Path) -> Iterator[BoundedLog]:
    log = BoundedLog(tmp_path / "logs" / "w.device.log")
    yield log
    log.close()


def kept(folder: Path) -> bytes:
    """Return all that the log and the one before it hold, in order."""
    paths = (folder / "logs" / "w.device.log.1", folder / "logs" / "w.device.log")
    return b"".join(path.read_bytes() for path in paths if path.exists())


def printing(code: str, *, into: BoundedLog) -> tuple[subprocess.Popen[bytes], Output]:
    output = Output(into)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=output.write_fd, stderr=output.write_fd
    )
    output.begin()
    return process, output


def test_the_logs_are_never_longer_than_16_mebibytes(tmp_path: Path, log: BoundedLog) -> None:
    size_bytes = []
    for number in range(2 * 2 * LONGEST_BYTES // PIECE_BYTES + 3):
        log.write(b"%06d " % number + bytes(PIECE_BYTES - 7))
        size_bytes.append(sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()))
    assert max(size_bytes) == 2 * LONGEST_BYTES
    assert kept(tmp_path)[-PIECE_BYTES:].startswith(b"%06d " % number)


def test_the_last_lines_before_a_crash_are_kept(tmp_path: Path, log: BoundedLog) -> None:
    code = f"import os\nos.write(1, bytes({20 * MIB}))\nos.write(2, b'the last line')\nos.abort()"
    process, output = printing(code, into=log)
    assert process.wait() < 0
    output.end(within_s=30)
    assert kept(tmp_path).endswith(b"the last line")
    assert len(kept(tmp_path)) <= 2 * LONGEST_BYTES


def test_what_its_children_print_is_kept_too(tmp_path: Path, log: BoundedLog) -> None:
    process, output = printing("import os\nos.system('echo from a child')", into=log)
    process.wait()
    output.end(within_s=30)
    assert kept(tmp_path) == b"from a child\n"


def test_a_process_that_keeps_the_pipe_open_is_not_waited_for(log: BoundedLog) -> None:
    process, output = printing("import time\ntime.sleep(60)", into=log)
    output.end(within_s=0.1)
    process.kill()
    process.wait()
    output.end(within_s=30)


def test_a_log_goes_on_where_an_earlier_worker_ended(tmp_path: Path, log: BoundedLog) -> None:
    log.write(b"earlier\n")
    later = BoundedLog(tmp_path / "logs" / "w.device.log")
    later.write(b"later\n")
    later.close()
    assert kept(tmp_path) == b"earlier\nlater\n"


def test_a_log_that_cannot_be_written_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file in the folder's place")
    log = BoundedLog(tmp_path / "logs" / "w.device.log")
    log.write(b"lost")
    log.write(b"lost, too")
    (tmp_path / "logs").unlink()
    log.write(b"kept")
    log.close()
    assert kept(tmp_path) == b"kept"
    assert caplog.text.count("is not kept") == 1


def test_a_full_disk_does_not_stop_who_prints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=2 * MIB) as disk:
        log = BoundedLog(disk / "w.device.log")
        process, output = printing(f"import os\nos.write(1, bytes({6 * MIB}))", into=log)
        assert process.wait(30) == 0
        output.end(within_s=30)
        log.close()
        assert os.path.getsize(disk / "w.device.log") <= 2 * MIB
    assert caplog.text.count("is not kept") == 1
