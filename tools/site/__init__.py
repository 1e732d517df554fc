"""What the documentation's site needs beside the pages of docs/: pages that are generated, and how docstrings are shown.

    pip install -e '.[docs]'
    mkdocs serve          # the site on this machine, which follows changes
    mkdocs build --strict # the site in site/; a link to nothing is an error
"""
