"""Read a YAML file from anywhere: no aliases, no repeated keys, no code, within a limit."""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from attnbalance.errors import DataError

LARGEST_FILE = 1_000_000
"""Bytes of a study file; the largest study that may be run fits into a tenth."""

LEADING_ZERO = re.compile("[-+]?0[0-9_]")
"""How a number with a leading zero begins."""


class _Loader(yaml.SafeLoader):
    """Plain values, written out: no aliases, which grow without bound when they are followed, and no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias where a value should begin."""
        if self.check_event(yaml.AliasEvent):
            raise DataError("aliases (*NAME) are not read; write the settings out, or put them into defaults")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Refuse text with half a character, which no file could hold, and YAML 1.1's numbers to base 60 and 8.

        1:30 would be read as 90, and 010 as 8.
        """
        value = super().construct_scalar(node)
        str(value).encode()
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
            if ":" in str(value):
                raise DataError(f"{value} would be read as a number to base 60; write it out, or put it in quotes")
            if LEADING_ZERO.match(str(value)):
                raise DataError(
                    f"{value} begins with a zero, which makes it a number to base 8; write it without, or put it in "
                    "quotes"
                )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a mapping of which one value would be lost."""
        names = Counter(str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise DataError(f"{name!r} occurs twice in one mapping (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> object:
    """What a study file holds, as lists, mappings, texts and numbers.

    Raises `DataError` for anything but a regular file of UTF-8 text, of at most `LARGEST_FILE` bytes of YAML.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError("it is not a regular file")
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise DataError(f"it has more than {LARGEST_FILE:,} bytes")
        return yaml.load(text.decode(), _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise DataError(f"cannot read the study {path}: {error.strerror}") from error
    except RecursionError as error:
        raise DataError(f"cannot read the study {path}: its lists and mappings are nested too deeply") from error
    except DataError as error:
        raise DataError(f"cannot read the study {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the study {path}: it is not UTF-8 text ({error}); save it as UTF-8") from error
    except Exception as error:  # YAMLError, and what a value raises that does not fit its tag, such as !!bool maybe
        raise DataError(f"cannot parse the study {path} as YAML: {' '.join(str(error).split())}") from error
