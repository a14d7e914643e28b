"""Who may use a box.

To read in this order:

    tokens         bearer tokens, by their hash; each has the name of an owner of jobs
    sessions       of browsers: a cookie that stands for a token
"""
