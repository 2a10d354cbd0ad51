"""Does a file appear whole or not at all, whoever else writes it?"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from torch import nn

import softequiv as se
from softequiv._files import written_whole
from softequiv.adapt import checkpoint, opening
from softequiv.errors import SoftEquivError

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


def test_a_full_disk_is_told_with_the_name_of_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(SoftEquivError, match=r"a\.json could not be written \(No space left on device\); make room"),
        written_whole(tmp_path / "a.json") as part,
    ):
        part.write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_whoever_writes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    for writer in (checkpoint, opening):
        monkeypatch.setattr(writer, "save_file", full)
    soft = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5)
    plain: Any = nn.Conv2d(3, 8, 5)
    plain.pretrained_cfg, plain.num_classes = {"architecture": "none"}, 8
    for write, model in ((se.save, soft), (se.save_model, plain)):
        with pytest.raises(SoftEquivError, match=r"model.* could not be written .*No space left.*; make room"):
            write(model, tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(SoftEquivError, match=r"m could not be written \(Not a directory\)"):
        se.save_model(plain, tmp_path / "file" / "m")


def test_a_place_where_nothing_can_be_written_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path / "file" / "a", "Not a directory"), (tmp_path / "none" / "a", "No such file")):
        with pytest.raises(SoftEquivError, match=rf"a could not be written \({reason}"), written_whole(place) as part:
            part.write_text(LINE)
