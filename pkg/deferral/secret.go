package deferral

import (
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// secretParts are what the names of secret mount options have in common, over
// cifs, ceph, glusterfs, fscrypt and the FUSE filesystems of object stores.
var secretParts = []string{"pass", "secret", "token", "cred", "apikey", "accesskey", "encryptionkey", "privatekey"}

// secretNames are whole option names that carry a secret or the way to one.
var secretNames = map[string]bool{
	"key": true, "keyfile": true, "keyring": true, "auth": true, "pwd": true, "pw": true, "cruid": true,
	"user": true, "username": true,
}

// secretLike tells whether a mount flag may carry a secret, and the option's
// name, which is all that may be repeated of it. It errs on the side of caution:
// a user= option of cifs may hold "user%password".
func secretLike(flag string) (string, bool) {
	for option := range strings.SplitSeq(flag, ",") {
		name, _, hasValue := strings.Cut(option, "=")
		name = strings.TrimSpace(name)
		plain := strings.ToLower(strings.NewReplacer("_", "", "-", "", ".", "").Replace(name))
		if hasValue && secretNames[plain] {
			return sys.Clip(name), true
		}
		for _, part := range secretParts {
			if strings.Contains(plain, part) {
				return sys.Clip(secretName(name, part)), true
			}
		}
	}
	return "", false
}

// secretName is the name where it is a plain word; a "name" such as
// "password:hunter2", which holds its value, is not repeated.
func secretName(name, part string) string {
	for _, r := range name {
		if r != '_' && r != '-' && r != '.' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') {
			return part
		}
	}
	if len(name) > 32 {
		return part
	}
	return name
}
