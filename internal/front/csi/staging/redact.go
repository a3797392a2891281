package staging

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	// shortestSecret: shorter values would take half of a text with them.
	shortestSecret = 3
	// shortestValue: shorter values of a context, and shorter lines of a secret, are
	// words such as "none", whatever their key.
	shortestValue = 8
	// longestText bounds the text that is searched for secrets. Its first 1 KiB is shown.
	longestText = 16 << 10
	// mostValues and mostBytes bound the secrets that are searched for, in about 12 forms each: who may
	// create a PersistentVolume writes a mount option that is a thousand of them.
	mostValues, mostBytes = 1024, 64 << 10
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
			if secretName(key) && len(value) >= shortestValue {
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
// password may have a comma. It adds no more than redact searches for.
func addOptions(secrets map[string]string, flag string) {
	add := func(value string) { secrets["mount option "+strconv.Itoa(len(secrets))] = value }
	for rest, more := flag, true; more && len(secrets) <= mostValues; {
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

// redact removes the values of secrets from a text, also where a program wrote them
// in another form. The longest goes first: a secret may be part of another one.
func redact(text string, secrets map[string]string) string {
	forms, size := make(map[string]bool), 0
	for _, value := range secrets {
		if size += len(value); size > mostBytes || len(secrets) > mostValues {
			return redactedWhole
		}
		addForms(forms, strings.TrimSpace(value), shortestSecret)
		addForms(forms, strings.Join(strings.Fields(value), " "), shortestSecret)
		for line := range strings.Lines(value) {
			addForms(forms, strings.TrimSpace(line), shortestValue)
		}
		for _, part := range partsOfJSON(value) {
			addForms(forms, part, shortestValue)
		}
	}
	sorted := slices.SortedFunc(maps.Keys(forms), func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	tooLong := len(text) > longestText
	if tooLong {
		text = text[:longestText]
	}
	for _, form := range sorted {
		text = strings.ReplaceAll(text, form, "[redacted]")
	}
	if tooLong && len(sorted) > 0 { // the text may have been cut within a secret
		text = text[:max(0, len(text)-len(sorted[0]))]
	}
	return text
}

// addForms adds a value and the forms in which programs print one: quoted by Go or
// another language, in JSON, in a URL, and in base64.
func addForms(forms map[string]bool, value string, shortest int) {
	if len(value) < shortest {
		return
	}
	forms[value] = true
	forms[inQuotes(strconv.Quote(value))] = true
	forms[inQuotes(strconv.QuoteToASCII(value))] = true
	if raw, err := json.Marshal(value); err == nil {
		forms[inQuotes(string(raw))] = true
	}
	forms[url.QueryEscape(value)] = true
	forms[url.PathEscape(value)] = true
	if len(value) < shortestValue {
		return // its base64 is so short that it may be part of a word
	}
	for before := range 3 {
		forms[base64Of(value, before, base64.RawStdEncoding)] = true
		forms[base64Of(value, before, base64.RawURLEncoding)] = true
	}
}

// partsOfJSON lists the strings in a secret that is JSON, such as the tokens of
// service accounts: a driver may repeat one of them.
func partsOfJSON(value string) (parts []string) {
	var parsed any
	if !strings.HasPrefix(strings.TrimSpace(value), "{") || json.Unmarshal([]byte(value), &parsed) != nil {
		return nil
	}
	for open := []any{parsed}; len(open) > 0; open = open[1:] {
		switch v := open[0].(type) {
		case string:
			parts = append(parts, v)
		case []any:
			open = append(open, v...)
		case map[string]any:
			open = slices.AppendSeq(open, maps.Values(v))
		}
	}
	return parts
}

func inQuotes(quoted string) string { return quoted[1 : len(quoted)-1] }

// base64Of is the part of a longer base64 text that the value alone decides, where a
// number of bytes stand before the value in its first group of three. So
// "user:password" is found by the password.
func base64Of(value string, before int, encoding *base64.Encoding) string {
	padded := strings.Repeat("\x00", before) + value
	encoded := encoding.EncodeToString([]byte(padded))
	return encoded[(before*8+5)/6 : len(padded)*8/6]
}
