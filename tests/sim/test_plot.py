"""The plot is an SVG that a parser reads, with every line in every panel and names escaped."""

from xml.etree import ElementTree

from agentrt.sim.plot import Series, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_lines_panels_and_names() -> None:
    lines = [Series("a<b", [(0.8, 100.0), (4.0, 50.0)]), Series("c", [(0.8, 10.0), (4.0, 20.0)])]
    root = ElementTree.fromstring(svg({"first": lines, "second": lines[:1]}, across="x", up="y"))
    drawn = [one for one in root.iter(f"{NAMESPACE}polyline") if one.get("stroke-width")]
    assert len(drawn) == 3
    assert len({one.get("stroke") for one in drawn}) == 2
    texts = [one.text for one in root.iter(f"{NAMESPACE}text")]
    assert {"a<b", "c", "first", "second", "0.8", "4", "105"} <= set(texts)


def test_nothing_to_plot() -> None:
    assert ElementTree.fromstring(svg({}, across="x", up="y")).tag == f"{NAMESPACE}svg"
