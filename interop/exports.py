"""An export of a head for a program, or why there is none."""

from pathlib import Path

from drafters.base import Drafter
from drafters.export import Export, dialect_named, write_as
from drafters.export.writing import refusals


def export_for(engine: str, head: Drafter, dialect: str, folder: Path) -> Export | str:
    """Write a head, unless it is refused: then why.

    Args:
        engine: that is to serve it, as exports name engines: it is refused where the dialect names
            it and the export does not, or the export names none. "" for what serves nothing.
        head: with its target attached.
        dialect: to write.
        folder: where to.

    Raises:
        ExportError: what is written does not come back.
    """
    form = dialect_named(dialect)
    if found := refusals(head, form):
        return "; ".join(found)
    export = write_as(dialect, head, folder)
    unnamed = engine in form.engines and engine not in export.served
    if engine and (unnamed or not export.served):
        return not_served(export)
    return export


def not_served(export: Export) -> str:
    """Why an engine that an export does not name is not tried."""
    return f"the export names what serves this head: {', '.join(export.served) or 'no engine'}"
