"""YAML whose every value knows its line: text in, `YamlValue` values out; every error is a SpecError at `file:line`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import yaml

from toast_cli.base.errors import SpecError, UsageError
from toast_cli.base.files import read_whole_number

T = TypeVar("T")

_KINDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "null": "empty"}


@dataclass(frozen=True, slots=True)
class YamlValue:
    """One YAML value. `name` is its path from the top (`hardware.topology.torus`), for messages."""

    node: yaml.Node
    source: str
    name: str

    @property
    def where(self) -> str:
        return f"{self.source}:{self.node.start_mark.line + 1}"

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_sequence(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def error(self, what: str, hint: str = "") -> SpecError:
        """A SpecError at this value's line."""
        return SpecError(what, where=self.where, hint=hint)

    def scalar(self, expected: str) -> str:
        """The text of a single non-empty value; `expected` describes it in the error."""
        if not isinstance(self.node, yaml.ScalarNode) or self._tag == "null":
            raise self.error(f"{self.name} is {self._kind}, not {expected}")
        return str(self.node.value)

    def integer(self) -> int:
        """A whole number, one or more."""
        text = self.scalar("a whole number")
        number = read_whole_number(text)
        if not number:
            raise self.error(f'{self.name} is "{text:.40}", not a whole number of one or more')
        return number

    def boolean(self) -> bool:
        text = self.scalar("true or false")
        if self._tag != "bool":
            raise self.error(f'{self.name} is "{text}"', "write true or false")
        return text.lower() in ("true", "yes", "on")

    def choice(self, allowed: Iterable[str]) -> str:
        """One of the allowed words."""
        words = list(allowed)
        text = self.scalar(f"one of {', '.join(words)}")
        if text not in words:
            raise self.error(f'{self.name} is "{text}"', nearest(text, words))
        return text

    def quantity(self, parse: Callable[..., T]) -> T:
        """The value read by one of the `units` parsers."""
        text = self.scalar("a quantity")
        if self._tag == "bool":
            raise self.error(f"{self.name} is {self._kind}, not a quantity")
        try:
            return parse(text)
        except UsageError as error:
            raise self.error(f"{self.name}: {error.what}", error.hint) from None

    def items(self) -> list[YamlValue]:
        """The entries of a list; a single value counts as a list of one."""
        if not isinstance(self.node, yaml.SequenceNode):
            return [self]
        return [YamlValue(node, self.source, f"{self.name}[{number}]") for number, node in enumerate(self.node.value)]

    def mapping(self) -> dict[str, YamlValue]:
        """The entries of a mapping in the order written; a key given twice is an error."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"{self.name or 'the specification'} is {self._kind}, not a mapping of keys to values")
        entries: dict[str, YamlValue] = {}
        for key_node, value in self.node.value:
            key = YamlValue(key_node, self.source, "a key").scalar("a single word")
            if key in entries:
                line = entries[key].node.start_mark.line + 1
                raise YamlValue(key_node, self.source, key).error(f'"{key}" is given twice', f"first on line {line}")
            entries[key] = YamlValue(value, self.source, f"{self.name}.{key}" if self.name else key)
        return entries

    def section(self, *allowed: str) -> dict[str, YamlValue]:
        """A mapping that may hold only the allowed keys; any other is an error that names the nearest."""
        entries = self.mapping()
        for (key_node, _), key in zip(self.node.value, entries, strict=True):
            if key not in allowed:
                place = f" in {self.name}" if self.name else ""
                raise YamlValue(key_node, self.source, key).error(f'unknown key "{key}"{place}', nearest(key, allowed))
        return entries

    @property
    def _tag(self) -> str:
        return str(self.node.tag).rpartition(":")[2]

    @property
    def _kind(self) -> str:
        if self.is_mapping:
            return "a mapping"
        return "a list" if self.is_sequence else _KINDS.get(self._tag, "text")


def read_yaml(text: str, source: str) -> YamlValue:
    """The document's top value.

    Raises SpecError with the line where the YAML is malformed, or when there is nothing.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise SpecError(f"not valid YAML: {error.problem or error.context}", where=where) from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"not valid YAML: {str(error).splitlines()[0]}", where=source) from None
    except RecursionError:
        raise SpecError("not valid YAML: nested too deeply", where=source) from None
    if node is None:
        raise SpecError("the file holds no specification", where=source, hint="see docs/reference/mesh-spec.md")
    return YamlValue(node, source, "")


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint with the valid words and the one nearest to `word`."""
    words = list(allowed)
    in_lower_case = {name.lower(): name for name in words}
    near = difflib.get_close_matches(word.lower(), in_lower_case, n=1)
    guess = f'did you mean "{in_lower_case[near[0]]}"? ' if near else ""
    return f"{guess}allowed: {', '.join(words)}"
