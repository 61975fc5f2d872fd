"""The report's frame: style sheet, tiles, tables and bars as HTML text.

`report` fills it. Everything is inline and nothing is loaded, so the page works from a mail or a
USB stick; colours are variables with one value for light and one for dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--fg:#1c1e21;--dim:#646b75;--line:#e4e5e8;
--hover:rgba(60,90,160,.12);--good:#15803d;--bad:#b91c1c;--wait:#a16207;
--s0:#2563eb;--s1:#e2660b;--s2:#15935a;--s3:#8b46c9;--s4:#d0323f;--s5:#0b8a99;--s6:#c93a8b;--s7:#84690f}
@media(prefers-color-scheme:dark){:root{--bg:#131519;--card:#1b1e24;--fg:#e7e9ec;--dim:#9aa2ad;
--line:#31353d;--hover:rgba(150,180,255,.16);--good:#4ade80;--bad:#f87171;--wait:#facc15;
--s0:#6ea0ff;--s1:#ff9a4d;--s2:#4cc98a;--s3:#bd8bf0;--s4:#ff7780;--s5:#46c8d6;--s6:#f07fbb;--s7:#cfae4a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 12px}
header p{margin:4px 0 0;color:var(--dim)}
.status{font-weight:600}.finished{color:var(--good)}.failed{color:var(--bad)}
.stopped,.not{color:var(--wait)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin-top:20px}
.tiles div,figure,details,.scroll,.problems{background:var(--card);border:1px solid var(--line);
border-radius:8px}
.tiles div{padding:12px 14px}
.tiles b{display:block;font-size:22px;font-variant-numeric:tabular-nums;white-space:nowrap}
.tiles span,.hint{color:var(--dim);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 14px 6px;min-width:0;display:flex;flex-direction:column}
figure>svg{display:block;width:100%;height:auto;margin-top:auto}
figcaption{display:flex;gap:10px;align-items:baseline;flex-wrap:wrap;overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--dim)}
.legend svg{width:18px;height:8px;margin-right:5px}
.grid{stroke:var(--line)}.base{stroke:var(--dim);stroke-opacity:.55}
.axis{fill:var(--dim);font-size:11px;font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.faint{stroke-opacity:.32;stroke-width:1}.dot{fill:var(--c)}
.hit{fill:transparent}.hit:hover{fill:var(--hover)}
.tables{display:flex;flex-wrap:wrap;gap:14px;align-items:flex-start}
.scroll{overflow-x:auto;max-width:100%;display:inline-block}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:left;border-top:1px solid var(--line);vertical-align:top}
tr:first-child>*{border-top:0}th{color:var(--dim);font-weight:500}
.n{text-align:right;white-space:nowrap}
.pairs td:first-child{color:var(--dim);white-space:nowrap}.pairs td{overflow-wrap:anywhere}
.bar{width:120px;height:12px;display:block;margin-top:5px}
.bar .track{fill:var(--line)}.bar .value{fill:var(--s0)}
.bar .mark{stroke:var(--fg);stroke-width:1.5}
details{padding:8px 14px;margin-bottom:10px}summary{cursor:pointer;font-weight:600}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,Menlo,Consolas,
"DejaVu Sans Mono",monospace;margin:10px 0}
details pre+pre{border-top:1px solid var(--line);padding-top:10px}
.problems{margin:12px 0 0;padding:10px 14px 10px 32px;color:var(--wait)}
"""


def page(
    *,
    title: str,
    status: str,
    reached: str,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[tuple[str, str]],
) -> str:
    """The whole document; `sections` are (heading, HTML)."""
    cards = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections)
    kind = status.split()[0]
    so_far = f" · {escape(reached)}" if reached else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main><header>"
        f'<h1>{escape(title)}</h1><p><span class="status {kind}">{escape(status)}</span>{so_far}'
        f'</p></header><div class="tiles">{cards}</div>{body}</main></body></html>\n'
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """A table of texts, empty without rows; `right` columns hold numbers, `raw` ones HTML."""
    if not rows:
        return ""
    kinds = [' class="n"' if i in right else "" for i in range(len(head))]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    lines = []
    for row in rows:
        cells = [text if i in raw else escape(text) for i, text in enumerate(row)]
        lines.append("".join(f"<td{k}>{c}</td>" for k, c in zip(kinds, cells, strict=True)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A list of label and value; empty without rows."""
    body = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in rows)
    return f'<div class="scroll"><table class="pairs">{body}</table></div>' if body else ""


def bar(share: float, *, mark: float) -> str:
    """A bar of a share of one, with a stroke at `mark` (chance)."""
    width, at = 120 * min(max(share, 0.0), 1.0), 120 * min(max(mark, 0.0), 1.0)
    return (
        '<svg class="bar" viewBox="0 0 120 12"><rect class="track" width="120" height="12" rx="2"/>'
        f'<rect class="value" width="{width:.1f}" height="12" rx="2"/>'
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="12"/>'
        f"<title>{100 * share:.1f}%; chance {100 * mark:.1f}%</title></svg>"
    )
