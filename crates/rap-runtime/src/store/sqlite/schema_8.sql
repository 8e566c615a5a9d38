-- Callback URLs that do not depend on the settings at the time of a retry.

ALTER TABLE calls ADD COLUMN callback_base TEXT; -- base of its callback URL, if it was sent or is to be
