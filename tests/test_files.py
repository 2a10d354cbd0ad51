"""Does a file appear whole or not at all, whoever else writes it?"""

from __future__ import annotations

import threading
from pathlib import Path

from softequiv._files import written_whole

LINE = "all of it\n" * 200


def test_threads_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    target, problems = tmp_path / "figures.json", []

    def write() -> None:
        for _ in range(50):
            try:
                with written_whole(target) as part:
                    part.write_text(LINE)
                if target.read_text() != LINE:
                    problems.append("torn")
            except OSError as problem:
                problems.append(str(problem))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert problems == []
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
