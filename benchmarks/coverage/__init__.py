"""Count which families of transformers run on fastgen.

`recipe` builds a model of any family, `family` runs its calls, `__main__` is the command.
"""
