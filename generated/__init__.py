"""Tables that functionalize.codegen generated. Only functionalize.ops.tables reads them."""
