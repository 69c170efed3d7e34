"""Draw the cache for the documentation: python scripts/draw_cache.py > docs/cache.svg"""

from __future__ import annotations

INK, FAINT, PAPER = "#333", "#bbb", "#fff"
PROMPT, ONE, OTHER = "#c9d7ee", "#f3cfa8", "#bfe0c4"
"""What both sequences share, and what belongs to either."""


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{INK}">{words}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, fill: str, words: str = "", free: bool = False
) -> str:
    dash = ' stroke-dasharray="4 3"' if free else ""
    drawn = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" '
        f'stroke="{FAINT if free else INK}"{dash}/>'
    )
    return drawn + (text(x + width / 2, y + height / 2 + 5, words, anchor="middle") if words else "")


def cells(x: float, y: float) -> list[str]:
    """A pool of cells: three tokens of a prompt, then one each of two branches, then free ones."""
    size, found = 44, [text(x, y - 34, "Attention child: cells", 15, bold=True)]
    found.append(text(x, y - 14, "one pool (unified); one K and V a cell in each attention layer", 12))
    contents = [(PROMPT, "0")] * 1 + [(PROMPT, "1"), (PROMPT, "2"), (ONE, "3"), (OTHER, "3"), (OTHER, "4")]
    for i in range(8):
        fill, position = contents[i] if i < len(contents) else (PAPER, "")
        left = x + i * size
        found.append(box(left, y, size, 28, fill, position, free=i >= len(contents)))
        for row, name in enumerate(("K, V of layer 3", "K, V of layer 7")):
            top = y + 44 + row * 30
            found.append(box(left, top, size, 24, fill, free=i >= len(contents)))
            if i == 0:
                found.append(text(x - 8, top + 17, name, 12, "end"))
    found.append(text(x - 8, y + 19, "position", 12, "end"))
    owners = ["A B", "A B", "A B", "A", "B", "B", "", ""]
    found.append(text(x - 8, y + 124, "owners", 12, "end"))
    found += [text(x + (i + 0.5) * size, y + 124, name, 12, "middle") for i, name in enumerate(owners)]
    return found


def slots(x: float, y: float) -> list[str]:
    """The table of two sequences and the states it points to, the zero slot last."""
    size, found = 62, [text(x, y - 34, "Recurrent child: slots", 15, bold=True)]
    found.append(text(x, y - 14, "one state a slot in each recurrent layer, and one slot that is zero", 12))
    table = [("A", ONE, 0), ("B", OTHER, 2), ("C (empty)", PAPER, 4)]
    top = y + 84
    for i, words in enumerate(("state", "", "state", "", "zero")):
        fill = {0: ONE, 2: OTHER}.get(i, "#eee" if words == "zero" else PAPER)
        for layer in range(3):
            shift = 5 * (2 - layer)
            label = words if layer == 2 else ""
            found.append(box(x + i * size + shift, top - shift, 50, 30, fill, label, free=not words))
    for i, (name, fill, slot) in enumerate(table):
        left = x + i * 104
        found.append(box(left, y, 92, 26, fill, name))
        found.append(
            f'<path d="M{left + 46} {y + 26} L{x + slot * size + 30} {top - 12}" stroke="{INK}" fill="none" '
            'marker-end="url(#arrow)"/>'
        )
    found.append(text(x - 8, y + 18, "sequence", 12, "end"))
    found.append(text(x - 8, top + 19, "layers 0, 1, 2, …", 12, "end"))
    return found


def drawing() -> str:
    """The whole picture, an SVG document."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" role="img">',
        "<title>A cache: cells of keys and values, and slots of states</title>",
        f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="640" height="400" fill="{PAPER}"/>',
        *cells(130, 54),
        *slots(130, 246),
        text(
            130,
            388,
            "A and B are branches of one prompt of three tokens; C is empty and reads zero.",
            11,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(drawing(), end="")
