"""The blocks of README.md and docs/: run, compared with what they show, renewed, counted.

    python -m tools.pages check [FILE ...]   run the blocks of these pages (of all); the first that differs is shown
    python -m tools.pages renew [FILE ...]   write into the pages what their blocks print today; look at the diff
    python -m tools.pages count [FILE ...]   how many blocks are run and compared

Each page has an empty folder, in which its blocks run from top to bottom:

    python                      runs; all such blocks of a page share their names. A `text` block that follows is what it prints
    python, yaml title="FILE"   is written to FILE in the folder, for the blocks that follow
    console                     `$ command` and what it prints. A line `...` stands for any lines, `[...]` for any text in a line
    sh                          commands: `mpar plan` runs, `mpar train` is planned instead, arguments of others are checked
    mermaid                     a picture
"""
