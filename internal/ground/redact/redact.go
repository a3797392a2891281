// Package redact removes secrets from texts of CSI drivers, which may repeat them.
package redact

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

const (
	// shortestSecret: shorter values would take half of a text with them.
	shortestSecret = 3
	// ShortestValue is that of a context, and the shortest line of a secret: shorter ones are words such as "none".
	ShortestValue = 8
	// longestText bounds the text that is searched for secrets. Its first 1 KiB is shown.
	longestText = 16 << 10
	// MostValues bounds the secrets that are searched for, in about 12 forms each: who may create a
	// PersistentVolume writes a mount option that is a thousand of them.
	MostValues = 1024
	// MostBytes bounds all of them together.
	MostBytes = 64 << 10
	// Whole stands in place of a driver's text.
	Whole = "[redacted as a whole: the request has too many secrets, or mount options like secrets, to search for: see the driver's log]"
)

// Secrets removes the values of secrets from a text, also where a program wrote them
// in another form. The longest goes first: a secret may be part of another one.
func Secrets(text string, secrets map[string]string) string {
	forms, size := make(map[string]bool), 0
	for _, value := range secrets {
		if size += len(value); size > MostBytes || len(secrets) > MostValues {
			return Whole
		}
		addForms(forms, strings.TrimSpace(value), shortestSecret)
		addForms(forms, strings.Join(strings.Fields(value), " "), shortestSecret)
		for line := range strings.Lines(value) {
			addForms(forms, strings.TrimSpace(line), ShortestValue)
		}
		for _, part := range partsOfJSON(value) {
			addForms(forms, part, ShortestValue)
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
	if len(value) < ShortestValue {
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

// base64Of is the part of a longer base64 text that the value alone decides, where a number of bytes stand before the
// value in its first group of three. So "user:password" is found by the password.
func base64Of(value string, before int, encoding *base64.Encoding) string {
	padded := strings.Repeat("\x00", before) + value
	encoded := encoding.EncodeToString([]byte(padded))
	return encoded[(before*8+5)/6 : len(padded)*8/6]
}
