"""Prepares docstrings for the site's reference: examples are shown as code, and options one by one."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe


class Prepared(griffe.Extension):
    """Calls the section `Example:` by the name that griffe knows, and lists `**options` as `help` does."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Function) and "lists_options" in {str(x.value) for x in obj.decorators}:
            _list_options(obj)
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def _list_options(function: griffe.Function) -> None:
    """Gives a function the parameters and the docstring that it has once it is loaded."""
    loaded = getattr(importlib.import_module(function.module.path), function.name)
    assert function.docstring is not None
    function.docstring.value = inspect.getdoc(loaded) or ""
    del function.parameters["options"]
    for row in inspect.signature(loaded).parameters.values():
        if row.name not in function.parameters:
            annotation = inspect.formatannotation(row.annotation)
            function.parameters.add(
                griffe.Parameter(
                    row.name,
                    annotation=annotation,
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(row.default),
                )
            )
