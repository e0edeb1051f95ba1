"""`python -m mlx_redrafter.convert`: a trained drafter, wherever it comes from, as a directory that MLX loads.

sources   which files a path or hub id means, and which are refused
tensors   what is stored in a file, read one tensor at a time, no code executed
pickles   the same of what torch has pickled
names     one mapping from every known style of names to Apple's
finding   the drafter among the tensors: located and checked, its rows read when asked for
streaming the drafter that was found, as a module
pack      dtype and quantization, layer by layer
placing   what may be replaced, and how the result takes its place
writing   the files of the result
report    what the conversion cost
conversion   all of it, in order; `command` is its flags
"""
