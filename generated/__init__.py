"""Tables that functionalize.codegen generated. Only functionalize.tables reads them."""
