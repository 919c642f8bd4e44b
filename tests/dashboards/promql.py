"""What PromQL names, read as text: metrics, and the labels that are asked of them. Enough for our own queries."""

import re

_METRIC = re.compile(r"\b(?:quire|gen_ai|process)_[a-z0-9_]+\b|\bup\b")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_SUFFIXES = ("_bucket", "_sum", "_count")


def metrics(query: str) -> set[str]:
    """Names of the series that it reads."""
    bare = re.sub(r"\{[^}]*\}", "", _GROUPING.sub("", query))
    return set(_METRIC.findall(bare))


def selectors(query: str) -> set[tuple[str, str]]:
    """(series, label) pairs in braces."""
    return {(name, label) for name, inside in _SELECTOR.findall(query) for label in _LABEL.findall(inside)}


def groupings(query: str) -> set[str]:
    """Labels that it groups by."""
    return {label.strip() for inside in _GROUPING.findall(query) for label in inside.split(",") if label.strip()}


def family(series: str, histograms: set[str]) -> str:
    """The metric of a series: a histogram's parts have its name and a suffix."""
    for suffix in _SUFFIXES:
        if series.endswith(suffix) and series.removesuffix(suffix) in histograms:
            return series.removesuffix(suffix)
    return series
