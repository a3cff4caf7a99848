"""The plan page: a plan or an estimate as one file of HTML.

`page_data` says what it shows, the template how, and `page.css` in which colours.
"""
