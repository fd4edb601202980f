"""Reading what users write: ``kinds`` says what a file is, ``document`` opens it, ``fields`` checks what stands in it.

``fields`` alone needs pydantic, whose import costs 0.15 s: it is imported where a file of a user is read and never on
the way to a prediction from shipped files, which the tests check with the same rules.
"""
