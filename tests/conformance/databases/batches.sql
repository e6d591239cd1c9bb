BEGIN TRANSACTION;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, record TEXT NOT NULL
);
INSERT INTO "batches" VALUES(1,'batch_1','t','validating','file-1','{"id": "batch_1", "tenant": "t", "endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h", "window_seconds": 86400, "created_at": 1000, "status": "validating", "times": {}, "metadata": null, "output_seconds": null, "output_file_id": "", "error_file_id": "", "has_output": false, "has_errors": false, "total": 0, "totals": [0, 0, 0, 0, 0], "errors": []}');
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, nbytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
INSERT INTO "files" VALUES(1,'file-1','t','file-1.jsonl','batch',10,1000,NULL);
CREATE INDEX files_of ON files (tenant, seq);
CREATE INDEX batches_of ON batches (tenant, seq);
CREATE INDEX batches_open ON batches (status);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('files',1);
INSERT INTO "sqlite_sequence" VALUES('batches',1);
COMMIT;
PRAGMA user_version = 1;
