BEGIN TRANSACTION;
CREATE TABLE accounts (
    day INTEGER, tenant TEXT, service_class TEXT, model TEXT,
    device_price REAL, prompt_price REAL, cached_price REAL, output_price REAL, currency TEXT,
    seconds REAL, requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER,
    PRIMARY KEY (tenant, day, service_class, model, device_price, prompt_price, cached_price, output_price, currency)
) WITHOUT ROWID;
INSERT INTO "accounts" VALUES(20000,'a','default','fox',0.5,0.0,0.0,0.0,'EUR',2.0,1,4,0,1);
CREATE TABLE saved (
    day INTEGER, tenant TEXT, layer TEXT, hits INTEGER, prompt_tokens INTEGER, output_tokens INTEGER, cost REAL,
    PRIMARY KEY (tenant, layer, day)
) WITHOUT ROWID;
INSERT INTO "saved" VALUES(20000,'a','exact',1,3,4,7.0);
CREATE TABLE unused (
    day INTEGER, model TEXT,
    device_price REAL, prompt_price REAL, cached_price REAL, output_price REAL, currency TEXT,
    idle REAL, overhead REAL,
    PRIMARY KEY (day, model, device_price, prompt_price, cached_price, output_price, currency)
) WITHOUT ROWID;
INSERT INTO "unused" VALUES(20000,'fox',0.5,0.0,0.0,0.0,'EUR',10.0,1.0);
COMMIT;
PRAGMA user_version = 1;
