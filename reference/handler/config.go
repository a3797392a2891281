package handler

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// ReadConfig reads a small JSON file into a configuration that has its defaults: the
// file that is named, or else the usual one, which need not exist. Unknown keys are
// errors.
func ReadConfig(named, usual string, into any) (file string, err error) {
	if file = named; file == "" {
		file = usual
	}
	f, err := os.Open(file) //nolint:gosec // whoever starts us says which
	switch {
	case err == nil:
		defer func() { _ = f.Close() }()
		if err := decodeOne(f, into); err != nil {
			return file, fmt.Errorf("the configuration %s cannot be read: %w", file, err)
		}
	case errors.Is(err, fs.ErrNotExist) && named == "":
	default:
		return file, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	return file, nil
}

// decodeOne reads a JSON object that has nothing after it.
func decodeOne(from io.Reader, into any) error {
	dec := json.NewDecoder(from)
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	if errors.Is(err, io.EOF) {
		return errors.New("it is empty; {} leaves all keys at their defaults")
	}
	if err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows its object")
	}
	return nil
}

// CheckPaths sees that paths of the configuration are absolute and clean, or not given.
func CheckPaths(file string, paths map[string]string) error {
	for key, path := range paths {
		if path != "" && (!filepath.IsAbs(path) || filepath.Clean(path) != path) {
			return fmt.Errorf("the configuration %s: %s: %q is not an absolute, clean path", file, key, path)
		}
	}
	return nil
}

// OwnProgram is the path of this program, unless another one is configured.
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
