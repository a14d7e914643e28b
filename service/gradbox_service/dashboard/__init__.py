"""The dashboard: a picture of the box that is read once for all who look, and the pages for it.

To read in this order:

    picture    the picture, and what one caller may see of it
    board      reads it when something changed and somebody looks
    history    use by owner over a span of time
    pages      the files under static/, and the headers that hold them in
    static/    HTML, CSS and modules of JavaScript, written by hand: no build step, no library
"""
