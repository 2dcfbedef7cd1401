from sqlite3 import *
from sqlite3 import dbapi2 as dbapi2
