"""The end of a run: the trained model is written, whatever else fails then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybrid.errors import ExportError
from hybrid.roles.export import Exported

if TYPE_CHECKING:
    from hybrid.session import Session
    from hybrid.trainer import Progress


def export(s: Session) -> Exported | None:
    """Write the trained policy as a Hugging Face folder; where it is, and what is wrong with it.

    Raises `ExportError` when no disk took it.
    """
    if not s.cfg.checkpoint.export:
        return None
    with s.phase("checkpoint"):
        return s.actor.call("export", str(s.run_dir / "model"), s.cfg.memory.swap_dir)[0]


def check_export(exported: Exported | None) -> None:
    """Raise `ExportError` when the model is not where it should be, or not whole."""
    if exported is not None and exported.problem is not None:
        raise ExportError(exported.problem)


@contextmanager
def exported_whatever_happens(s: Session, progress: Progress) -> Iterator[None]:
    """Around what users' own code may end after training: the model is exported before such an error goes on."""
    try:
        yield
    except Exception:
        try:
            exported = export(s) if progress.weight_version else None
        except Exception as error:
            s.report.warn(f"the model could not be exported either: {error}")
        else:
            if exported is not None:
                s.report.warn(
                    exported.problem or f"the trained model is in {exported.folder}, whatever ends the run now"
                )
        raise
