package handler

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// errUnknownKey is that of a configuration that is read, but for a key that a newer version may know.
var errUnknownKey = errors.New("unknown key")

// Tolerate returns an error of ReadConfig unless all that is wrong is a key that is not known. Only what makes a container
// is refused then: after a rollback those that there are have to end, and their volumes.
func Tolerate(err error) error {
	if errors.Is(err, errUnknownKey) {
		return nil
	}
	return err
}

// ReadConfig reads a JSON file into a configuration that holds the defaults, and completes it: the named file, or else
// the usual one, which may be missing. Unknown keys are errors, after all others.
func ReadConfig(named, usual string, into any, complete func(file string) error) error {
	file := cmp.Or(named, usual)
	raw, err := os.ReadFile(file) //nolint:gosec // whoever starts us says which
	switch {
	case err == nil:
		err = decode(raw, into)
	case errors.Is(err, fs.ErrNotExist) && named == "":
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("the configuration %s cannot be read: %w", file, err)
	}
	if Tolerate(err) != nil {
		return err
	}
	return cmp.Or(complete(file), err)
}

func decode(raw []byte, into any) error {
	if err := json.Unmarshal(raw, into); err != nil {
		return inTermsOfTheFile(err)
	}
	strict := json.NewDecoder(bytes.NewReader(raw))
	strict.DisallowUnknownFields()
	if err := strict.Decode(into); err != nil { // nothing else can be wrong
		return fmt.Errorf("%s: %w", strings.TrimPrefix(err.Error(), "json: unknown field "), errUnknownKey)
	}
	return nil
}

// inTermsOfTheFile rewords an error of the decoder: which key is wrong, and what it accepts.
func inTermsOfTheFile(err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case !ok:
		return fmt.Errorf("it is not valid JSON: %w ({} leaves all keys at their defaults)", err)
	case wrong.Field == "":
		return errors.New("it is not a JSON object of keys and values")
	}
	words := map[string]string{"array": "a list", "object": "an object", "string": "text", "bool": "true or false", "number": "a number"}
	is := cmp.Or(words[wrong.Value], strings.TrimPrefix(wrong.Value, "number ")) // a number may have its digits
	return fmt.Errorf("%s: %s cannot stand here; it takes %s", wrong.Field, is, sys.KindWord(wrong.Type))
}

// CheckPaths checks that the paths of the configuration are empty, or absolute and clean.
func CheckPaths(file string, paths map[string]string) error {
	for key, path := range paths {
		if path != "" && (!filepath.IsAbs(path) || filepath.Clean(path) != path) {
			return fmt.Errorf("the configuration %s: %s: %q is not an absolute, clean path", file, key, path)
		}
	}
	return nil
}

// OwnProgram returns the configured path of this program, by default its own.
func OwnProgram(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("the path of this program cannot be told: %w", err)
	}
	return self, nil
}
