package staging

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/ground/redact"
)

// SecretsOf are the values of a request that no error may repeat: its secrets, and
// what else may be one, such as the tokens of service accounts and passwords in mount options.
func SecretsOf(req interface {
	GetSecrets() map[string]string
	GetPublishContext() map[string]string
	GetVolumeContext() map[string]string
	GetVolumeCapability() *csi.VolumeCapability
},
) map[string]string {
	out := make(map[string]string)
	maps.Copy(out, req.GetSecrets())
	for _, more := range []map[string]string{req.GetPublishContext(), req.GetVolumeContext()} {
		for key, value := range more {
			if secretName(key) && len(value) >= redact.ShortestValue {
				out["context "+key] = value
			}
		}
	}
	for _, flag := range req.GetVolumeCapability().GetMount().GetMountFlags() {
		addOptions(out, flag)
	}
	return out
}

// addOptions adds the values of secret options in a mount flag, each up to a comma and up to the end of the flag: a
// password may have a comma. It adds no more than are searched for.
func addOptions(secrets map[string]string, flag string) {
	add := func(value string) { secrets["mount option "+strconv.Itoa(len(secrets))] = value }
	for rest, more := flag, true; more && len(secrets) <= redact.MostValues; {
		var name string
		if name, rest, more = strings.Cut(rest, "="); more && secretName(name[strings.LastIndexByte(name, ',')+1:]) {
			value, _, _ := strings.Cut(rest, ",")
			add(rest)
			add(value)
		}
	}
}

func plainValues(all map[string]string) map[string]string {
	kept := maps.Clone(all)
	maps.DeleteFunc(kept, func(key, _ string) bool { return secretName(key) })
	return kept
}

// withoutMarks is made once, of 6 KiB: a request can have half a million mount flags.
var withoutMarks = strings.NewReplacer("-", "", "_", "", ".", "")

// secretName errs on the side of caution: a value that is left out costs a clear
// error after a restart, one that is kept may be somebody's password.
func secretName(key string) bool {
	key = strings.ToLower(withoutMarks.Replace(key))
	parts := []string{"pass", "secret", "token", "cred", "key", "auth", "chap"}
	return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(key, part) })
}
