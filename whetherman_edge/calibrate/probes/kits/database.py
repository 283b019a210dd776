"""Tables: SQLite in memory, read-only, and a statistics tool over the same tables."""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, choice, schema

_ROWS_MAX: Final = 12
_OPCODES_MAX: Final = 200_000
_ALLOWED: Final = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


def _permit(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


class Database(Kit):
    """list_tables, run_sql, column_stats. Setting: "tables": {name: {"columns": [...], "rows": [[...], ...]}}."""

    name: ClassVar[str] = "database"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("list_tables", "List the tables of the shop's database with their columns.", schema({})),
        Tool(
            "run_sql",
            "Run one read-only SQL query (SQLite) on the shop's database; returns at most 12 rows.",
            schema({"query": "str: a SELECT"}),
        ),
        Tool(
            "column_stats",
            "Compute a figure over a numeric column, if wanted only over rows where another column has a value.",
            schema(
                {
                    "table": "str: ",
                    "column": "str: ",
                    "operation": choice(("sum", "mean", "min", "max", "median", "count")),
                },
                {"where_column": "str: ", "where_value": "str: "},
            ),
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._tables: dict[str, dict[str, Any]] = dict(setting.get("tables", {}))
        self._base: sqlite3.Connection | None = None

    def _connection(self) -> sqlite3.Connection:
        if self._base is None:
            # a world is used by one run at a time, which may move between threads
            self._base = sqlite3.connect(":memory:", check_same_thread=False)
            for name, table in self._tables.items():
                columns = ", ".join(f'"{column}"' for column in table["columns"])
                self._base.execute(f'CREATE TABLE "{name}" ({columns})')
                marks = ", ".join("?" * len(table["columns"]))
                self._base.executemany(f'INSERT INTO "{name}" VALUES ({marks})', table["rows"])
            self._base.commit()
            self._base.set_authorizer(_permit)
        return self._base

    def list_tables(self) -> str:
        return "\n".join(f"{name}({', '.join(t['columns'])})" for name, t in self._tables.items()) or "no tables"

    def run_sql(self, query: str) -> str:
        base = self._connection()
        base.set_progress_handler(lambda: 1, _OPCODES_MAX)  # ends a query that would not end
        try:
            cursor = base.execute(query)
            rows = cursor.fetchmany(_ROWS_MAX + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ToolFault(f"SQL: {error}") from None
        names = [column[0] for column in cursor.description or ()]
        lines = [" | ".join(names), *(" | ".join(str(v)[:80] for v in row) for row in rows[:_ROWS_MAX])]
        return "\n".join(lines) + ("\n… more rows" if len(rows) > _ROWS_MAX else "") if rows else "no rows"

    def column_stats(
        self, table: str, column: str, operation: str, where_column: str = "", where_value: str = ""
    ) -> str:
        if table not in self._tables:
            raise ToolFault(f"no table {table[:40]!r}")
        data = self._tables[table]
        for name in filter(None, (column, where_column)):
            if name not in data["columns"]:
                raise ToolFault(f"no column {name[:40]!r} in {table}")
        at = data["columns"].index(column)
        rows = data["rows"]
        if where_column:
            where = data["columns"].index(where_column)
            rows = [row for row in rows if str(row[where]).lower() == where_value.lower()]
        values = [row[at] for row in rows]
        if operation == "count":
            return str(len(values))
        if not values or not all(isinstance(value, int | float) for value in values):
            raise ToolFault("no numbers there")
        made: dict[str, Callable[[list[Any]], Any]] = {
            "sum": sum,
            "mean": statistics.fmean,
            "min": min,
            "max": max,
            "median": statistics.median,
        }
        return f"{round(float(made[operation](values)), 4):g}" if operation == "mean" else f"{made[operation](values)}"

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None
