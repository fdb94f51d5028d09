"""Jobs in which ranks are killed, stopped, raise or leave a collective out: how soon that is told, and how they end."""
