"""The engine, written once for every toolkit: beam state and finishing rules, the shared cache, edits of the scores."""
