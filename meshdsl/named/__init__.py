"""The named program: tensors with named dimensions, on no device yet."""
