"""Labelled traffic: readers that stream, what a card makes of rows, splits, and two data sets.

`source` opens files, frames and Ray Datasets as one kind of thing, a `RowSource`; `encode` turns
its rows into the flat tensors a card names; `splits` finds train, validation and test; `movielens`
and `synthetic` make data at run time. Nothing is imported here: reading a card needs no torch.
"""
