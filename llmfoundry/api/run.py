"""`Run`: what a training has left in its folder, and `Rows`, its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry.errors import UserError, import_optional
from llmfoundry.loggers.metrics_file import BATCH, read_metrics
from llmfoundry.loggers.run_record import read_run_record
from llmfoundry.recipe.paths import find_file

if TYPE_CHECKING:
    import pandas

    from llmfoundry.api.model import Model


class Rows(list[dict[str, Any]]):
    """Rows with the values of a table by column."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame."""
        return import_optional("pandas", "to_pandas", package="pandas").DataFrame(list(self))


class Run:
    """A training run, finished or not.

    `lf.train` returns one. `lf.Run("runs/quickstart")` is the run of a folder.

    >>> run = lf.Run("runs/quickstart")
    >>> run.name, run.stopped
    ('quickstart', '')
    >>> [batch for batch, _ in run.metric("loss/train/total")][-1] == run.batch
    True

    Attributes:
        folder: the run's folder, as an absolute path.
        stopped: what has stopped it: a signal (`SIGINT`), `pause_at`, or the reason that a callback
            gave. Empty if the run is complete, or if this process has not trained it.
    """

    def __init__(
        self, folder: str | Path, *, stopped: str = "", address: str | None = None
    ) -> None:
        """Open the run of a folder.

        Args:
            folder: the run's folder on this machine.
            stopped: see the class.
            address: name of the run for `lf.load`, such as a URL; None: the folder, which must
                exist then.

        Raises:
            UserError: there is no such folder on this machine.
        """
        if address is None and "://" in str(folder):
            raise UserError(
                f"folder: {folder} is an address; write a run's folder of this machine, or"
                " lf.load(address) for the model of the run"
            )
        self.folder = (
            find_file(folder, "folder") if address is None else Path(folder).expanduser().absolute()
        )
        self.stopped = stopped
        self._address = address or str(self.folder)

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self._record().get("name") or self.folder.name)

    @property
    def status(self) -> str:
        """`finished`, `killed` (stopped and saved), `failed` or `running`; empty: not begun."""
        return str(self._record().get("summary", {}).get("status", ""))

    @property
    def metrics(self) -> Rows:
        """The rows of metrics.jsonl, each a mapping of metrics by Composer's names."""
        path = self.folder / "metrics.jsonl"
        return Rows(read_metrics(path) if path.is_file() else [])

    @property
    def batch(self) -> int:
        """The last batch in the metrics."""
        return max((int(row[BATCH]) for row in self.metrics), default=0)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Return batch and value of one metric, in order."""
        return [(int(row[BATCH]), row[name]) for row in self.metrics if name in row]

    def model(self, **settings: Any) -> Model:
        """Load the newest checkpoint; `settings` are those of `lf.load`."""
        from llmfoundry.api.model import load

        return load(self._address, **settings)

    def _record(self) -> dict[str, Any]:
        return read_run_record(self.folder)

    def __fspath__(self) -> str:
        return self._address

    def __repr__(self) -> str:
        stopped = f", stopped={self.stopped!r}" if self.stopped else ""
        return f"Run({str(self.folder)!r}{stopped})"
