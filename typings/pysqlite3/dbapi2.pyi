from sqlite3.dbapi2 import *
