"""`openelm chat`: a conversation held as its ids (`conversation`), and the ways to show one (`terminal`, `script`)."""
