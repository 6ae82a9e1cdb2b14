"""interop: exports loaded and served by the programs they are for, each in an environment of its
own, and the table of what was found.
"""
