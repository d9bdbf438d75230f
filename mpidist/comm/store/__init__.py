"""rendezvous → store_server → key_value_table: the store of an ``mpi://`` rendezvous."""
