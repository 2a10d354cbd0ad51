"""How does one watch a training? Its log, line by line, as TensorBoard draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from softequiv.errors import imported
from softequiv.training.loop import LOG

BOARD = "tensorboard"  # the folder of what TensorBoard reads


class Board:
    """Writes each new line of a training's log for TensorBoard; call it after steps, and once at the end."""

    def __init__(self, folder: Path) -> None:
        tensorboard = imported("torch.utils.tensorboard", "TensorBoard is not installed", "tensorboard")
        self.log, self.changed = folder / LOG, 0
        self.shown = len(self._lines())
        self.writer: Any = tensorboard.SummaryWriter(str(folder / BOARD))

    def __call__(self, step: int = 0) -> None:
        """Show what the log has gained."""
        changed = self.log.stat().st_mtime_ns if self.log.is_file() else 0
        if changed == self.changed:
            return
        self.changed, lines = changed, self._lines()
        for line in lines[self.shown :]:
            for name, value in line.items():
                if name != "epoch":
                    self.writer.add_scalar(name, value, line["epoch"])
        self.shown = len(lines)
        self.writer.flush()

    def _lines(self) -> list[dict[str, float]]:
        if not self.log.is_file():
            return []
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
