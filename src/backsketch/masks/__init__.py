"""Which rows of an input count: padded tokens get no gradient, so nothing is kept of them."""
