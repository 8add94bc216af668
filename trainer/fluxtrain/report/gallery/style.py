"""The style of the page: the reader's font, black on white, or white on black where that is preferred."""

STYLE = """
:root { --ink: #1b1f23; --faint: #6a737d; --line: #d8dee4; --back: #fff; --blue: #0b6bcb; --red: #c4320a;
  --grey: #b6bec7; --green: #2da44e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --faint: #98a2ad; --line: #353b42;
  --back: #14171a; --blue: #6cb2ff; --red: #ff8a65; --grey: #56606b; --green: #57c777; } }
* { box-sizing: border-box; }
body { margin: 2rem auto 4rem; padding: 0 1.5rem; max-width: 88rem;
  color: var(--ink); background: var(--back);
  font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .7rem; }
.figures { display: flex; flex-wrap: wrap; gap: .4rem 2.4rem; margin: 0; }
.figures dt { color: var(--faint); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
.samples th { text-align: left; font-weight: 400; vertical-align: top; padding: 0 1rem .6rem 0; }
.samples thead th { color: var(--faint); font-size: .82rem; white-space: nowrap; }
.samples tbody th { position: sticky; left: 0; background: var(--back); min-width: 11rem; max-width: 16rem; }
.samples td { padding: 0 .5rem .6rem 0; vertical-align: top; }
.samples img { display: block; width: 9rem; height: auto; border-radius: 3px; }
.prompt { display: block; overflow-wrap: anywhere; max-height: 8em; overflow-y: auto; }
small, .note, footer { color: var(--faint); font-size: .82rem; }
.curve svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
polyline.raw { stroke: var(--grey); stroke-width: 1; }
polyline.smooth { stroke: var(--blue); }
polyline.evaluation { stroke: var(--red); }
circle.evaluation { fill: var(--red); }
circle.smooth { fill: var(--blue); }
svg .target { stroke: var(--green); stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: 1.4rem; list-style: none; margin: .2rem 0 0; padding: 0;
  color: var(--faint); font-size: .82rem; }
.legend li::before { content: ""; display: inline-block; width: 1.2rem; height: 2px; margin-right: .45rem;
  vertical-align: middle; background: var(--grey); }
.legend .smooth::before { background: var(--blue); }
.legend .evaluation::before { background: var(--red); }
.legend .target::before { background: var(--green); }
.settings th { text-align: left; font-weight: 400; color: var(--faint); padding: .1rem 2rem .1rem 0;
  vertical-align: top; white-space: nowrap; }
.settings td { overflow-wrap: anywhere; }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--blue); }
pre { font-size: .82rem; overflow-x: auto; }
footer { margin-top: 2.5rem; white-space: pre-line; }
"""
