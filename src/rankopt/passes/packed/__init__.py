"""Follow a rectangle of ragged ids through a graph and compute its present tokens only.

Every operator that treats tokens alike is emitted a second time on packed rows: no row for a place
without an id, so nothing is computed there. Where tokens meet, in attention and in sums, an
operator that knows the lengths takes over. What is not understood refuses the whole rectangle, so a
rewrite never mixes the two forms.

- `packer`: goes through the graph, and finds what follows each operator.
- `packing`: one rectangle's rewrite, as those that follow operators see it.
- `tokens`, `layout`, `masks`, `attention`: the operators by what they do; each file ends in a table
  of those it follows.
- `values`: the forms that a value may have on the way.

Shapes: B rows, C context tokens before the ids, H places for ids, S = C + H + 1 positions when a
token of the candidate's own follows, T packed tokens (B * C + L ids), A heads, K width of a head.
"""
