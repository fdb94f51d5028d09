"""The rows of families, in two forms.

A class of `TablePolicy` describes the changes to each class of module. A row of a JSON file is a `Plan`, which gives
styles to paths as transformers' plans do. `declared.json` is written by hand. The other files were derived from tiny
models, and verified; they have a line for each family.
"""
